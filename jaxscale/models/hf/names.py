"""The mapping between the tensors of a Hugging Face file and a model's parameters.

A kernel of ours is [in, out]. ``torch.nn.Linear`` stores [out, in], transformers'
``Conv1D`` (GPT-2) stores [in, out]. Our blocks are stacked, [L, ...]; files have one
tensor per block.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A tensor of a file and the parameters that it holds."""

    name: str
    """Name in the file; ``{layer}`` stands for the number of the block."""
    parameters: tuple[str, ...]
    """Paths in the model; several are joined along their last dimension."""
    transpose: bool = False
    """The file stores a kernel as [out, in]."""
    first_layer: int = 0
    """Number that the first of the stacked blocks has in the file."""
    inner_blocks: int = 1
    """Number of stacked blocks that share a number; ``{inner}`` in the name is the
    index of a block among them."""
    groups: int = 1
    """Number of groups (heads) in the joined dimension: each holds its share of the
    first parameter, then of the second, and so on."""

    @property
    def stacked(self) -> bool:
        """Each block has a tensor of its own."""
        return "{layer}" in self.name

    def tensor(self, layer: int | None) -> str:
        """Name of the tensor of one of the stacked blocks; None if not stacked."""
        if layer is None:
            return self.name
        number, inner = divmod(layer, self.inner_blocks)
        return self.name.format(layer=number + self.first_layer, inner=inner)


def linear(
    theirs: str,
    *ours: str,
    bias: bool = True,
    transpose: bool = True,
    groups: int = 1,
) -> list[TensorMap]:
    """The tensors of a linear layer, or of several whose outputs are joined.

    Args:
        theirs: Name in the file.
        *ours: Paths of the layers in the model.
        bias: The layers have biases.
        transpose: The file stores kernels as [out, in].
        groups: The same as for `TensorMap`.
    """
    kernel = TensorMap(
        name=f"{theirs}.weight",
        parameters=tuple(f"{path}.kernel" for path in ours),
        transpose=transpose,
        groups=groups,
    )
    if not bias:
        return [kernel]
    biases = tuple(f"{path}.bias" for path in ours)
    return [kernel, TensorMap(name=f"{theirs}.bias", parameters=biases, groups=groups)]


def layer_norm(theirs: str, ours: str) -> list[TensorMap]:
    """The tensors of a layer norm."""
    bias = TensorMap(name=f"{theirs}.bias", parameters=(f"{ours}.bias",))
    return [scale(theirs, ours), bias]


def scale(theirs: str, ours: str) -> TensorMap:
    """The tensor of a norm without a bias."""
    return TensorMap(name=f"{theirs}.weight", parameters=(f"{ours}.scale",))


def table(theirs: str, ours: str) -> TensorMap:
    """The tensor of an embedding."""
    return TensorMap(name=f"{theirs}.weight", parameters=(f"{ours}.table",))
