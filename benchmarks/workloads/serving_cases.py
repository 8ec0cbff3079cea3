"""The cases of `benchmarks.serving`."""

from typing import Any

from benchmarks.measure.harness import Case, Params


DEFAULTS = {"slots": "default"}
TILE_WISE = {"tw50": 0.5, "tw75": 0.75}
"""The sparsity of blocks, by ``weights`` of a case."""
MASKS = "bytes_27m"
"""The trained model whose masks pruned cases have, of `benchmarks.pruned_model`."""


def load_case(name: str, model: str, workload: str, gap_ms: float, **more: Any) -> Case:
    """Requests that arrive over time; `more` are other params."""
    params = {
        "model": model,
        "workload": workload,
        "requests": 32,
        "arrivals": "constant",
        "gap_ms": gap_ms,
        "slots": 32,
        "window_s": 2.0,
    }
    return Case(name, params | more)


def token_case(
    model: str,
    batch: int,
    context: int,
    weights: str | None = None,
    tp: int = 1,
    layers: int | None = None,
    masks: str = MASKS,
) -> Case:
    """A step of a full batch.

    Args:
        model: Of `jaxscale.models.preset`.
        batch: Rows.
        context: Tokens of each.
        weights: int8, fp8 or fp8_dynamic, if not bf16; tw50 or tw75, if pruned.
        tp: Devices.
        layers: Of the model; None is all.
        masks: Of pruned weights, a name in `benchmarks.pruned_model`.
    """
    params: dict[str, Any] = {"model": model, "batch": batch, "context": context}
    name = f"token_b{batch}_c{context}"
    if layers is not None:
        name, params["layers"] = f"{name}_l{layers}", layers
    if weights is not None:
        name, params["weights"] = f"{name}_{weights}", weights
    if weights in TILE_WISE:
        params["masks"] = masks
    if tp > 1:
        name, params["tp"] = f"{name}_tp{tp}", tp
    return Case(name, params)


def http_case(model: str, streams: int, prompt: int, output: int) -> Case:
    """Requests at once through HTTP; an answer has `output` tokens on average."""
    sizes = {"streams": streams, "prompt": prompt, "output": output}
    return Case(f"http_{streams}_streams", {"model": model, **sizes})


def cases() -> list[Case]:
    """All that `benchmarks.serving` measures."""
    poisson = {"arrivals": "poisson"}
    many = poisson | {"slots": 128, "requests": 512}
    long = DEFAULTS | {"requests": 1000}
    models = ("llama1_7b", "llama3_1_8b")
    sizes = ((1, 264), (32, 264), (128, 1024))
    split = (("llama1_13b", {}), ("llama3_70b", {"layers": 8}))
    return [
        *(token_case(models[1], batch, 450) for batch in (128, 256, 512)),
        *(token_case(model, *size) for model in models for size in sizes),
        *(token_case(models[1], *s, w) for s in sizes for w in ("int8", "fp8")),
        token_case(models[1], *sizes[2], "fp8_dynamic"),
        *(token_case(models[1], *s, w) for s in sizes[:2] for w in TILE_WISE),
        *(token_case(models[1], batch, 264, tp=2) for batch in (1, 16, 64)),
        *(
            token_case(model, batch, 264, tp=tp, layers=layers)
            for model, layers in (("llama3_70b", 8), ("llama1_13b", None))
            for batch in (1, 32)
            for tp in (1, 4)
        ),
        *(
            load_case(f"constant_{gap}ms", "llama1_7b", "flover", gap)
            for gap in (0, 135, 500)
        ),
        *(
            load_case(f"poisson_{gap}ms", "llama1_7b", "flover", gap, **poisson)
            for gap in (20, 100, 500)
        ),
        load_case("random_lengths", "llama1_7b", "flover:2048", 0),
        load_case("saturated", models[1], "sharegpt", 10, **many),
        *(
            load_case(f"saturated_{name}", models[1], "sharegpt", 10, **many, **own)
            for name, own in (
                *((w, {"weights": w}) for w in ("fp8", "fp8_dynamic")),
                ("fp8_dynamic_kv_fp8", {"weights": "fp8_dynamic", "kv": "fp8"}),
                *((w, {"weights": w, "masks": MASKS}) for w in TILE_WISE),
            )
        ),
        *(
            load_case(f"saturated_one_size{name}", models[1], "sharegpt", 10, **case)
            for name, own in (
                ("", {}),
                *((f"_{w}", {"weights": w, "masks": MASKS}) for w in TILE_WISE),
            )
            for case in (many | {"sizes": "one"} | own,)
        ),
        load_case("half_load", models[1], "sharegpt", 40, **many),
        load_case("saturated_defaults", models[1], "sharegpt", 10, **many | DEFAULTS),
        load_case("long_prompts", models[1], "sharegpt:8000", 80, **many | DEFAULTS),
        *(
            load_case(f"saturated_tp{tp}", model, "sharegpt", 10, **many, tp=tp, **more)
            for model, more in split
            for tp in (2, 4)
        ),
        *(
            load_case(f"all_at_once_{i}_{o}", models[1], f"{i}/{o}", 0, **long)
            for i, o in ((1000, 1000), (128, 2048))
        ),
        http_case(models[1], 256, 128, 192),
    ]


def is_pruned(params: Params) -> bool:
    """Whether the blocks of a case are tile-wise sparse."""
    return params.get("weights") in TILE_WISE
