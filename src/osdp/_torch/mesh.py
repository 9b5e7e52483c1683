"""What we need of device meshes beyond their public names."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh


def unflattened(mesh: DeviceMesh, sizes: tuple[int, int], suffixes: tuple[str, str]) -> DeviceMesh:
    """A mesh of one dimension seen as two, of the same root: parameters may lie on it beside other dimensions."""
    assert mesh.mesh_dim_names is not None
    (name,) = mesh.mesh_dim_names
    return mesh._unflatten(0, sizes, (f"{name}_{suffixes[0]}", f"{name}_{suffixes[1]}"))
