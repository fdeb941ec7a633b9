"""Which global rank does which part of the work: `mesh` has the terms, `degrees` the rules, `device_mesh` torch's view of it."""

from smpc.mesh.mesh import Axis, Degrees, Mesh, check_degrees

__all__ = ["Axis", "Degrees", "Mesh", "check_degrees"]
