"""Tests of actors without processes: a program and hundreds of simulated processes in one thread, from one seed.

Inside a `Simulation` everything of monarch_backend.actor works as ever, on the same code: routing, trees, windows,
calls, supervision, restarts. Only what lies below is simulated: frames on their way, time, threads, the start and the
end of processes. So a test can kill any process at any moment, wait a day, and do it all again, in milliseconds:

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

`Conditions` make it harder: late frames, slow deaths, processes that never come, memory that is full. Run a test with
many seeds, ``Simulation(seed, Conditions.draw(random.Random(seed)))``; a failure names its seed and tells the last
steps, and the same seed fails the same way. ``simulation.later`` has something happen while the test waits, such as a
death in the middle of a call. To look at every step, append a function to ``simulation.on_step``; tests/testing/ of
this project checks its promises like that.

Other machines are there, too, with all that happens between a controller and its hosts:

>>> with Simulation(seed=7) as simulation:
...     hosts = simulation.attach(4)
...     adders = hosts.spawn_procs({"gpus": 2}).spawn("adders", Adder, 40)
...     simulation.cut(hosts.slice(hosts=1), seconds=0.5)  # nobody takes that for a loss
...     print(set(adders.add.call(2).get().values()), simulation.now > 0.5)
...     simulation.kill_hosts(hosts.slice(hosts=1))
...     print(adders.add.call(3).exception().failure.deaths[0].host)
{42} True
host2

What it cannot do: actors need plain ``def`` endpoints, and share this process with its globals. Time passes only
between their messages: time.sleep holds up everybody, and threads of theirs are not simulated. What waits in an actor
(for a future, or a generator for its reader) runs the others on top of its own stack, and goes on only when those that
came later do: chains of actors that wait for each other need callbacks, or there is a SimulationError. A ``bootstrap``
is not run. os._exit ends the test: use ``context().actor_instance.kill()``.
"""

from monarch_backend import _wiring as _wiring
from monarch_backend._testing.fault_model import Conditions
from monarch_backend._testing.process import SimulatedProcess
from monarch_backend._testing.simulator import Simulation, SimulationError

__all__ = ["Conditions", "SimulatedProcess", "Simulation", "SimulationError"]
