"""Pretrained models: from a source to fine-tune, or from a run."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder import EncoderModel
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families.registry import config_from_hf
from jaxscale.models.hf.files import Checkpoint
from jaxscale.models.hf.hub import local_directory
from jaxscale.models.hf.load import check_files, load, own_head
from jaxscale.nn.lora import Frozen, merge_adapters
from jaxscale.sharding.parameters import place, shardings
from jaxscale.sharding.rules import AxisRules
from jaxscale.sharding.tensor_parallel import TensorParallel
from jaxscale.training import run as run_directory
from jaxscale.training.assemble import adapted, make_model
from jaxscale.training.checkpoint.store import Checkpointer
from jaxscale.training.config import TrainConfig
from jaxscale.training.kept_head import kept_of, with_head
from jaxscale.training.step import frozen_part, with_frozen


logger = logging.getLogger("jaxscale.training")


def pretrained(
    config: TrainConfig,
    mesh: Mesh,
    rules: AxisRules | None = None,
    *,
    places: AxisRules | None = None,
) -> Decoder | EncoderModel:
    """The model of ``config.source``, with types and adapters as `config` says.

    An encoder gets the head of `config`, with the parameters of the files if they have
    the same head. Another head keeps the pooler, and the rows of labels that both have;
    the rest is new.

    Args:
        config: The settings of the run, with the source.
        mesh: The devices.
        rules: Mesh axes of each logical axis; None is those of `config`.
        places: Rules that the parameters are sharded by; None is `rules`. Others are
            for layers that do not divide over pipeline stages.

    Raises:
        FileNotFoundError: there is no such source, or a file of it is missing.
        ValueError: it does not match ``config.model``, or is damaged.
    """
    assert config.source is not None
    rules = config.axis_rules if rules is None else rules
    places = rules if places is None else places
    directory = local_directory(config.source)
    logger.info("reading the weights of %s", config.source)
    if run_directory.is_run(directory):
        model = _of_run(config, directory, mesh, places)
    else:
        model = _of_hugging_face(config, directory, mesh, places)
    config.of_model(model)  # raises if it has another shape
    # It computes by the settings, wherever it lies: neither by `places`, nor with the
    # `quantization` of `load`, which is that of serving.
    described = jax.eval_shape(
        lambda: make_model(config, rules=rules, tensor_parallel=config.tensor_parallel)
    )
    model = jax.tree.unflatten(jax.tree.structure(described), jax.tree.leaves(model))
    return adapted(config, model)


def load_model(
    directory: Path,
    mesh: Mesh,
    rules: AxisRules,
    *,
    dtype: str | None = None,
    step: int | None = None,
    tensor_parallel: TensorParallel = None,
    like: TrainConfig | None = None,
) -> Decoder | EncoderModel:
    """The dense model of a checkpoint, restored directly onto the mesh.

    Args:
        directory: Directory of the run.
        mesh: The devices.
        rules: Mesh axes of each logical axis.
        dtype: Type of the computation; None is that of the run.
        step: Step of the checkpoint; None is the newest.
        tensor_parallel: Communication of the model, whatever it was during the run.
        like: Settings of a run that continues to train the model, which override its
            types, remat, scan_layers, communication and quantization.

    Raises:
        ValueError: model and mesh do not fit, or the run file is damaged.
        FileNotFoundError: there is no such checkpoint.
    """
    run = run_directory.read_config(directory)
    run.model.check_mesh(dict(mesh.shape), rules)
    how: dict[str, Any]
    how = {"remat": "none", "scan_layers": True, "quantization": None}
    if like is not None:
        how = {name: getattr(like, name) for name in how}
        dtype, tensor_parallel = like.dtype, like.tensor_parallel
    run = dataclasses.replace(
        run, tensor_parallel=None, dtype=dtype or run.dtype, **how
    )

    def init() -> Decoder | EncoderModel:
        return make_model(run, rules=rules, tensor_parallel=tensor_parallel)

    if run.lora.rank:
        run = dataclasses.replace(run, tensor_parallel=tensor_parallel)
        return merge_adapters(load_adapted(directory, run, mesh, rules, step=step))
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(init)
    target = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        abstract,
        shardings(abstract, mesh, rules),
    )
    with _open_checkpoints(directory, run) as checkpoints:
        return checkpoints.restore_model(target, step)


def _open_checkpoints(directory: Path, config: TrainConfig) -> Checkpointer:
    """The checkpoints of the run of `config`, read-only."""
    return Checkpointer(
        directory / "checkpoints",
        config=run_directory.checkpoint_settings(config),
        source=config.source,
        read_only=True,
    )


def load_adapted(
    directory: Path,
    config: TrainConfig,
    mesh: Mesh,
    rules: AxisRules,
    *,
    step: int | None = None,
) -> Decoder | EncoderModel:
    """The model of a run with adapters, beside the weights that they are trained on.

    Raises:
        FileNotFoundError: there is no such checkpoint, or the source is gone.
        ValueError: run and source do not match, or the source has other weights than
            the adapters were trained on.
    """
    if config.source is None:
        raise ValueError(
            f"{directory} holds adapters of a model that was given to fit; load that "
            "model, and restore the adapters into it with Checkpointer.restore_model"
        )
    model = place(pretrained(config, mesh, rules), mesh, rules)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        nnx.state(model, nnx.Not(Frozen)),
    )
    with _open_checkpoints(directory, config) as checkpoints:
        trained = checkpoints.restore_model(target, step, base=frozen_part(model))
    return with_frozen(trained, model)


def check_source(config: TrainConfig) -> None:
    """Check that the model of ``config.source`` matches ``config.model``.

    Only its settings and the headers of its files are read.

    Raises:
        FileNotFoundError: there is no such source, or a file of it is missing.
        ValueError: it does not match, is of an unsupported kind, or its files do not
            fit its settings.
    """
    if config.source is None:
        if config.lora.rank:
            raise ValueError(
                f"lora.rank {config.lora.rank} adapts a model that has weights; name "
                "them in source (jaxscale train --from)"
            )
        return
    directory = local_directory(config.source)
    if run_directory.is_run(directory):
        found = run_directory.read_config(directory).model
    else:
        found = config_from_hf(Checkpoint(directory).config)
    ours, theirs = dataclasses.asdict(config.model), dataclasses.asdict(found)
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"model.{name} is {ours.get(name)!r}, but the weights of source "
                f"{config.source} were made with {theirs.get(name)!r}; leave the shape "
                "of the model as it is"
            )
    if not run_directory.is_run(directory):
        check_files(directory)
    # Raises if the adapters are for layers that the model lacks.
    jax.eval_shape(lambda: adapted(config, make_model(config)))


def _of_run(
    config: TrainConfig, directory: Path, mesh: Mesh, rules: AxisRules
) -> Decoder | EncoderModel:
    run = run_directory.read_config(directory)
    if run.param_dtype != config.param_dtype:
        raise ValueError(
            f"source {directory} has parameters of param_dtype {run.param_dtype}, and "
            f"the settings ask for {config.param_dtype}; set them alike"
        )
    if run.head != config.head:
        raise ValueError(
            f"source {directory} was trained with the head {run.head}, and the "
            f"settings ask for {config.head}; write it as a Hugging Face directory "
            "with `jaxscale export`, from where it takes another head"
        )
    return load_model(directory, mesh, rules, like=config)


def _of_hugging_face(
    config: TrainConfig, directory: Path, mesh: Mesh, rules: AxisRules
) -> Decoder | EncoderModel:
    options: dict[str, Any] = {"tensor_parallel": config.tensor_parallel}
    kept = None
    if isinstance(config.model, EncoderConfig):
        own = own_head(Checkpoint(directory))
        if config.head is not None and config.head != own:
            kept = kept_of(config.model, own, config.head)
            logger.info("%s", kept.told)
        if kept is not None and not kept.anything:
            kept = None
        options = {"head": "file" if own == config.head or kept else config.head}
    model = load(
        directory,
        seed=config.seed,
        mesh=mesh,
        rules=rules,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        remat=config.remat,
        scan_layers=config.scan_layers,
        **options,
    )
    if kept is None:
        return model
    assert config.head is not None
    return with_head(model, config.head, kept, seed=config.seed, mesh=mesh, rules=rules)
