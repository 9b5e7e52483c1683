"""What we need of device meshes beyond their public names."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug


def unflattened(mesh: DeviceMesh, sizes: tuple[int, int], suffixes: tuple[str, str]) -> DeviceMesh:
    """A mesh of one dimension seen as two, of the same root: parameters may lie on it beside other dimensions."""
    assert mesh.mesh_dim_names is not None
    (name,) = mesh.mesh_dim_names
    return mesh._unflatten(0, sizes, (f"{name}_{suffixes[0]}", f"{name}_{suffixes[1]}"))


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """All dimensions of a mesh as one, of the same root."""
    assert mesh.mesh_dim_names is not None
    return mesh._flatten("_".join(mesh.mesh_dim_names))


def forget_meshes() -> None:
    """Drops what DTensor remembers of operations on meshes of a process group that has ended.

    A mesh of a later one may equal them, and would get results on the old mesh, whose groups are gone.
    """
    debug._clear_sharding_prop_cache()
