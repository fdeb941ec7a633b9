"""This process's place in its job, and where the job meets, from the environment that torch's, MPI's or Slurm's launcher gives. Pure."""

from smpc.places.place import LOOPBACK, Launch, Place, is_loopback, meeting_port

__all__ = ["LOOPBACK", "Launch", "Place", "is_loopback", "meeting_port"]
