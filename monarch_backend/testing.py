"""Simulation of actors for tests: a program and hundreds of processes in one thread, repeatable from one seed.

Inside a `Simulation` all of monarch_backend.actor runs its real code: routing, trees, windows, calls, supervision,
restarts. The layers below are simulated: frames, time, threads, the start and the end of processes. So a test can kill
any process at any moment, wait for a day, and repeat that, in milliseconds:

>>> from monarch_backend.actor import Actor, endpoint, this_host
>>> from monarch_backend.testing import Simulation
>>> class Adder(Actor):
...     def __init__(self, start):
...         self.value = start
...     @endpoint
...     def add(self, n):
...         self.value += n
...         return self.value
>>> with Simulation(seed=7) as simulation:
...     procs = this_host().spawn_procs({"gpus": 8}, name="workers")
...     adders = procs.spawn("adders", Adder, 40)
...     print(list(adders.add.call(2).get().values()))
...     pending = adders.add.call(3)
...     simulation.kill(procs.slice(gpus=3))
...     print(pending.exception().rank, pending.exception().delivery)
...     survivors = adders.without(adders.failed_ranks)
...     print(survivors.size("gpus"), set(survivors.add.call(0).get().values()))
...     print(simulation.faults[0].deaths[0].what)
[42, 42, 42, 42, 42, 42, 42, 42]
3 unknown
7 {45}
killed by signal 9 (SIGKILL)

`Conditions` add faults: late frames, deaths that are noticed late, processes that never start, full memory. Run a test
with many seeds, ``Simulation(seed, Conditions.draw(random.Random(seed)))``. A failure names its seed and the last
steps, and the same seed fails in the same way. ``simulation.later`` calls a function while the test waits, for example
to kill a process during a call. Append a function to ``simulation.on_step`` to check each step; tests/testing/ of this
project does that.

Other hosts are simulated as well, with the protocol between a controller and its hosts:

>>> with Simulation(seed=7) as simulation:
...     hosts = simulation.attach(4)
...     adders = hosts.spawn_procs({"gpus": 2}).spawn("adders", Adder, 40)
...     simulation.cut(hosts.slice(hosts=1), seconds=0.5)  # too short to lose the host
...     print(set(adders.add.call(2).get().values()), simulation.now > 0.5)
...     simulation.kill_hosts(hosts.slice(hosts=1))
...     print(adders.add.call(3).exception().failure.deaths[0].host)
{42} True
host2

Limits:

- Actors have plain ``def`` endpoints, and share this process with its globals.
- Time advances only between messages: ``time.sleep`` stops the whole simulation, and threads of actors are not
  simulated.
- An actor that waits, for a future or for the reader of its generator, runs the others on its own stack. It continues
  after those that began to wait later. Chains of actors that wait for each other raise SimulationError: use callbacks.
- A ``bootstrap`` is not run. ``os._exit`` ends the test: use ``context().actor_instance.kill()``.
"""

from monarch_backend import _wiring as _wiring
from monarch_backend._testing.fault_model import Conditions
from monarch_backend._testing.process import SimulatedProcess
from monarch_backend._testing.simulator import Simulation, SimulationError

__all__ = ["Conditions", "SimulatedProcess", "Simulation", "SimulationError"]
