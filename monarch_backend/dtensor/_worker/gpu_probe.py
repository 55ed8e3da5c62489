"""Probe for a process's GPU, before an executor needs one: a failure of the executor would end the program."""

from __future__ import annotations

import os
import socket

import torch

from monarch_backend._actor.actor import Actor, endpoint


class Gpus(Actor):
    """Probe actor in each process of a mesh of GPUs."""

    @endpoint
    def missing(self) -> str:
        """Return why this process has no GPU that its torch can use; or ""."""
        if torch.cuda.is_available():
            return ""
        built = torch.version.cuda or torch.version.hip
        why = "torch finds no GPU here" if built else "torch is built without support for GPUs"
        return f"{why} (host {socket.gethostname()}, pid {os.getpid()}, torch {torch.__version__})"
