"""GPU performance: peaks of the data sheets, and the rates that programs reach.

All machine constants of the planner are here, with their origin.
"""

import dataclasses

from jaxscale.checks import check_integers, check_positive


PEAK_BF16_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
}
"""Dense bf16 FLOP/s of the data sheets, by the prefix of the device name."""


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of a device, None if unknown.

    Args:
        device_kind: Name of the device, of ``jax.devices()[0].device_kind``.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3")
        989000000000000.0
        >>> print(peak_flops("cpu"))
        None
    """
    for name, peak in PEAK_BF16_FLOPS.items():
        if device_kind.startswith(name):
            return peak
    return None


def mfu(
    tokens_per_second_per_device: float, flops_per_token: float, peak_flops: float
) -> float:
    r"""Model FLOP/s utilization, a fraction of 1.

    .. math:: \mathrm{MFU} = \frac{r \, F}{P}

    The FLOPs per token :math:`F` count the matmuls of forward and backward pass,
    without recomputation. There are two conventions for the attention matrix, `causal`
    (the half that is needed) and `full`; they differ by 12% for LLaMA-3 8B at 8,192
    tokens, so both are always reported. Both assume one sequence per row: with sequence
    packing of short documents less attention is computed than they count.

    Args:
        tokens_per_second_per_device: r; tokens that have a target.
        flops_per_token: F, see `jaxscale.models.DecoderConfig.flops_per_token`.
        peak_flops: P, in FLOP/s, of one device.

    Example:
        >>> round(mfu(10_000, 45e9, 989e12), 3)
        0.455

    References:
        PaLM (arXiv 2204.02311), appendix B.
    """
    return tokens_per_second_per_device * flops_per_token / peak_flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """A GPU and its links, by the rates that large programs reach.

    Example:
        >>> H200.rate(stride=1, size=8) == H200.link  # neighbors
        True
        >>> H200.rate(stride=8, size=16) == H200.nic  # one GPU of each host
        True
    """

    name: str
    """Name in tables."""
    peak: float
    """Dense bf16 FLOP/s of the data sheet: what MFU is measured against."""
    matmul: float
    """FLOP/s of large matmuls."""
    matmul_fp8: float | None = None
    """FLOP/s of large matmuls in fp8, None if it has none."""
    fp32: float
    """FLOP/s of large matmuls in full float32, not TF32."""
    attention: float
    """FLOP/s of causal attention, forward and backward, counting the useful half."""
    hbm: float
    """Bytes/s of memory."""
    link: float
    """Bytes/s per GPU in collectives within a host."""
    nic: float
    """Bytes/s per GPU between hosts."""
    memory: float
    """Bytes of memory."""
    host: float = 50e9
    """Bytes/s from and to host memory, in each direction."""
    host_gpus: int = 8
    """GPUs per host."""
    origin: str = ""
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        names = ("peak", "matmul", "fp32", "attention", "hbm")
        check_positive(self, *names, "link", "nic", "host", "memory")
        check_integers(self, 1, "host_gpus")

    def rate(self, *, stride: int, size: int) -> float:
        """Bytes/s per GPU in a collective of `size` GPUs that are `stride` apart.

        Within a host it is the bandwidth of the links. Across hosts the GPUs of one
        host share a ring, so the bandwidths of their network cards add up, to at most
        the links.
        """
        if stride * size <= self.host_gpus:
            return self.link
        return min(self.link, max(1, self.host_gpus // stride) * self.nic)

    def neighbor_rate(self, *, stride: int, size: int) -> float:
        """Bytes/s to the next of `size` GPUs that are `stride` apart, for the slowest.

        If some neighbors are on another host, all wait for these.
        """
        return self.link if stride * size <= self.host_gpus else self.nic


H200 = Hardware(
    name="H200",
    peak=PEAK_BF16_FLOPS["NVIDIA H200"],
    matmul=788e12,
    matmul_fp8=1380e12,
    fp32=50e12,
    attention=512e12,
    hbm=4.0e12,
    link=300e9,
    nic=45e9,
    memory=141e9,
    origin="products (cubes of 8,192, also in fp8), attention (whole rows of 4,096, "
    "cuDNN), memory and links (an all-gather over 4) measured here; between hosts 90% "
    "of 400 Gbit/s, to the own host 80% of PCIe 5, float32 75% of the data sheet, not "
    "measured",
)
"""One H200 in a host with NVLink."""

H100 = Hardware(
    name="H100",
    peak=PEAK_BF16_FLOPS["NVIDIA H100"],
    matmul=720e12,
    matmul_fp8=1260e12,
    fp32=50e12,
    attention=480e12,
    hbm=2.8e12,
    link=300e9,
    nic=45e9,
    memory=80e9,
    origin="products (of LLaMA 8B's widths, on two) measured here; the rest by the "
    "data sheet from the H200, not measured",
)
"""One H100 SXM in a host with NVLink."""

A100 = Hardware(
    name="A100",
    peak=PEAK_BF16_FLOPS["NVIDIA A100"],
    matmul=231.5e12,
    fp32=15e12,
    attention=140e12,
    hbm=1.6e12,
    link=200e9,
    nic=22e9,
    host=22e9,
    memory=80e9,
    origin="shares of the data sheet at which two steps of Megatron-LM come out that "
    "the paper on MegaScale publishes (arXiv 2402.15627, table 2), not measured here",
)
"""One A100 SXM in a host with NVLink and 200 Gbit/s per GPU."""

B200 = Hardware(
    name="B200",
    peak=PEAK_BF16_FLOPS["NVIDIA B200"],
    matmul=1700e12,
    matmul_fp8=3000e12,
    fp32=56e12,
    attention=1150e12,
    hbm=6.6e12,
    link=600e9,
    nic=45e9,
    memory=180e9,
    origin="by the data sheet from the H200, not measured",
)
"""One B200 SXM in a host with NVLink."""

HARDWARE = {gpu.name.lower(): gpu for gpu in (H200, H100, A100, B200)}
"""The GPUs that the planner knows, by name."""


def hardware_of(device_kind: str) -> Hardware | None:
    """The expected performance of a device, None if unknown.

    Example:
        >>> hardware_of("NVIDIA H100 80GB HBM3") is H100
        True
        >>> print(hardware_of("NVIDIA H100 PCIe"), hardware_of("cpu"))
        None None
    """
    names = (name for name in PEAK_BF16_FLOPS if device_kind.startswith(name))
    return HARDWARE.get(next(names, "").removeprefix("NVIDIA ").lower())
