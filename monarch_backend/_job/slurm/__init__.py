"""`SlurmJob`: hosts in an allocation of Slurm. job.py has the class, and node.py runs on each node."""
