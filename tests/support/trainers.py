"""Make trainers of small models on CPU devices, with a profile that nobody measured."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import user_tasks
from hetpipe.data.keyed_order import epoch_order
from hetpipe.models.chain import ChainModel
from hetpipe.training.trainer import AdamW, Callback, Trainer
from partition.plan import Pipeline, Plan, Stage
from runs import chain_plan, cluster_file, made_up_profile_of

BATCH, STEPS = 16, 6


def module(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return user_tasks.build_plain().double()


def two_pipelines() -> Plan:
    first = Pipeline(2, 10, (Stage(("here/0",), (0, 2), 2), Stage(("here/1",), (2, 5), 1)))
    second = Pipeline(4, 6, (Stage(("here/2",), (0, 3), 2), Stage(("here/3",), (3, 5), 1)))
    return Plan("manual", "mine", BATCH, (first, second))


def trainer(place: Path, plan: Plan | None = None, model: Any = None, **options: Any) -> Trainer:
    """A trainer in float64 on CPU devices, with a profile that nobody measured."""
    place.mkdir(exist_ok=True)
    model = module() if model is None else model
    chain = ChainModel.from_module(model, torch.zeros(1, user_tasks.NUM_FEATURES, dtype=torch.float64))
    profile = made_up_profile_of(chain, "mine", dtype="float64", sequence_length=1)
    chosen: dict[str, Any] = {
        "data": user_tasks.samples(),
        "optimizer": AdamW(1e-2),
        "loss": user_tasks.squared_error,
        "cluster": cluster_file(place),
        "profile": profile,
        "folder": place / "run",
        "save": False,
        **options,
    }
    return Trainer(model, plan=plan or chain_plan("mine", [0, 2, 5], 4), progress=False, **chosen)


class Recorder(Callback):
    """Notes what it is told; ends training at a step or a checkpoint."""

    def __init__(self, stop_at: int | None = None, stop_at_checkpoint: int | None = None) -> None:
        self.told: list[tuple[str, Any]] = []
        self.metrics: list[Mapping[str, Any]] = []
        self.paths: list[Path] = []
        self.sources: list[Path | None] = []
        self.stop_at, self.stop_at_checkpoint = stop_at, stop_at_checkpoint

    def on_begin(self, source: Path | None) -> None:
        self.sources.append(source)

    def on_step_end(self, metrics: Mapping[str, Any]) -> bool:
        self.told.append(("step", metrics["step"]))
        self.metrics.append(metrics)
        return metrics["step"] == self.stop_at

    def on_checkpoint(self, step: int, path: Path) -> bool:
        self.told.append(("checkpoint", step))
        self.paths.append(path)
        return step == self.stop_at_checkpoint

    def on_end(self, report: Any) -> None:
        self.told.append(("end", report.steps))


def losses(folder: Path, plan: Plan | None = None, *, steps: int = STEPS, **options: Any) -> list[float]:
    recorder = Recorder()
    trainer(folder, plan, callbacks=[recorder], **options).fit(steps)
    return [entry["loss"] for entry in recorder.metrics]


def plain_losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rate: Callable[[int], float],
    *,
    data: Any = None,
    steps: int = STEPS,
    batch: int = BATCH,
    terms: int | None = None,
    seed: int = 0,
) -> list[float]:
    """The same training by torch alone; rate: multiple of each group's learning rate; terms: of a step."""
    data, found = user_tasks.samples() if data is None else data, []
    first_rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        positions = range(step * batch, (step + 1) * batch)
        chosen = [data[epoch_order(seed, p // len(data), len(data))[p % len(data)]] for p in positions]
        x, y = torch.stack([x for x, _ in chosen]), torch.stack([y for _, y in chosen])
        loss = user_tasks.squared_error(model(x), y) / (terms or batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, first in zip(optimizer.param_groups, first_rates, strict=True):
            group["lr"] = first * rate(step)
        optimizer.step()
        found.append(loss.item())
    return found
