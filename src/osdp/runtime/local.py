"""What a rank holds of a tensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor's part on this rank, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
