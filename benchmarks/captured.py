"""A captured model for the benchmarks; apart from `common`, because it imports torch.

Captures are kept in build/captured: benchmarks that go on where they were need not trace a model again. What was
captured by other code than today's is not used: the file's name has a digest of the sources that capture.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import osdp
from osdp.cluster.device import Device
from osdp.cost.training import Training
from osdp.model.graph import ModelGraph
from osdp.model.source import load_model

KEPT = Path(__file__).parent.parent / "build" / "captured"


def captured(name: str, training: Training, device: Device | None = None) -> ModelGraph:
    """The model as its kernels are on a device, by default this CPU."""
    dtype = training.precision.compute_dtype
    on = "" if device is None else f"{device.name}-"
    path = KEPT / f"{name}-{on}{dtype}-{_digest()}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    graph = load_model(name).capture(dtype, device=device)
    KEPT.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(graph))
    return graph


def _digest() -> str:
    sources = sorted(Path(osdp.__file__).parent.glob("model/**/*.*"))
    texts = (path.read_bytes() for path in sources if path.suffix in (".py", ".toml"))
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]
