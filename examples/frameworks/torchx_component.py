"""Component of TorchX: a controller and its hosts in the replicas of one role.

    torchx run --scheduler local_cwd torchx_component.py:hosts --script train.py --replicas 2

The script calls `host_mesh_from_env`.
"""

import torchx.specs as specs

from monarch_backend.job import torchx_app


def hosts(script: str, replicas: int = 2, image: str = "", gpu: int = 0) -> specs.AppDef:
    """Run a script with a host in each replica.

    Args:
        script: the script, which calls host_mesh_from_env
        replicas: the number of hosts
        image: an image with monarch_backend
        gpu: the number of GPUs of each host
    """
    app: specs.AppDef = torchx_app(["python", script], replicas, name="hosts", image=image, gpu=gpu)
    return app
