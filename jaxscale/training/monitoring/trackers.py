"""Metrics for Weights & Biases and MLflow, configured by their environment variables.

Each stores the service's id of the run in the run's directory, so that a resumed run
continues there.
"""

import dataclasses
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.training.config import TrainConfig
from jaxscale.training.monitoring.monitor import Record, Writer


class _Tracker(Writer):
    """Base class of the two trackers."""

    _package: str

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Name the run; it is opened by `start`.

        Args:
            directory: Directory of the run; made if needed.
            settings: Settings shown with the run, such as
                ``dataclasses.asdict(config)``.
            **options: Further arguments of ``wandb.init`` or ``mlflow.start_run``.

        Raises:
            ImportError: the package of the service is not installed.
        """
        try:
            self._service: Any = importlib.import_module(self._package)
        except ImportError as error:
            raise ImportError(
                f"{type(self).__name__} needs {self._package}: "
                f"pip install {self._package}"
            ) from error
        self._directory = Path(directory)
        self._settings = dict(settings or {})
        self._options = options
        self._run: Any = None

    def _known(self) -> str | None:
        """The service's id of the run, if it is resumed."""
        file = self._directory / f"{self._package}.id"
        return file.read_text().strip() if file.is_file() else None

    def _keep(self, name: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / f"{self._package}.id").write_text(f"{name}\n")


class WandbWriter(_Tracker):
    """Metrics for Weights & Biases: ``WANDB_PROJECT``, ``WANDB_MODE`` and the like.

    Example:
        >>> writer = WandbWriter("runs/tiny", project="tiny")  # doctest: +SKIP
    """

    _package = "wandb"

    def start(self, first_step: int, total_steps: int) -> None:
        """Open the run, or resume it after `first_step`."""
        known = self._known() if first_step else None
        again = {} if known is None else {"id": known, "resume": "allow"}
        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = self._service.init(
            dir=str(self._directory), config=self._settings, **again, **self._options
        )
        self._keep(self._run.id)

    def write(self, record: Record) -> None:
        """Log each finite number under its own name."""
        step, metrics = _split(record)
        self._run.log(metrics, step=step)

    def close(self) -> None:
        """Send the remaining records."""
        if self._run is not None:
            self._run.finish()


class MlflowWriter(_Tracker):
    """Metrics for MLflow: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``.

    Example:
        >>> writer = MlflowWriter("runs/tiny", run_name="tiny")  # doctest: +SKIP
    """

    _package = "mlflow"

    def start(self, first_step: int, total_steps: int) -> None:
        """Open the run, or resume it after `first_step`."""
        known = self._known() if first_step else None
        self._run = self._service.start_run(run_id=known, **self._options)
        if known is None:
            self._service.log_params(_flat(self._settings))
            self._keep(self._run.info.run_id)

    def write(self, record: Record) -> None:
        """Log each finite number under its own name."""
        step, metrics = _split(record)
        # The active run is that of the thread which opened it.
        name = self._run.info.run_id
        self._service.log_metrics(metrics, step=step, run_id=name)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._service.end_run()


def trackers(config: TrainConfig) -> list[Writer]:
    """The writers that ``config.trackers`` names."""
    kinds = {"wandb": WandbWriter, "mlflow": MlflowWriter}
    settings = dataclasses.asdict(config)
    return [kinds[n](config.output_dir, settings=settings) for n in config.trackers]


def _split(record: Record) -> tuple[int, dict[str, float]]:
    values = {n: float(v) for n, v in record.items() if v is not None and n != "step"}
    return int(record["step"] or 0), values


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
