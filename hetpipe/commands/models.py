"""models: what --model takes."""

from typing import Any

from hetpipe.commands.options import JsonOption
from hetpipe.commands.output import print_json
from hetpipe.models.huggingface_folder import ARCHITECTURES
from hetpipe.models.names import MODEL_ENTRIES
from hetpipe.reporting.tables import new_table, show


def models_command(json: JsonOption = False) -> None:
    """List the models by name, and the architectures of Hugging Face folders that are taken."""
    if json:
        print_json(_as_json())
        return
    names = new_table("model", "task", "what it is")
    for model in MODEL_ENTRIES:
        names.add_row(model.name, str(model.task), model.description)
    folders = new_table("architecture of a folder", "task")
    for architecture, (_, task) in ARCHITECTURES.items():
        folders.add_row(architecture, task)
    show(
        [
            names,
            folders,
            "a folder: --model ./my-model, as save_pretrained writes it, with weights or without",
            "any other chain of layers: hetpipe.Trainer, from Python",
        ]
    )


def _as_json() -> dict[str, Any]:
    return {
        "models": [
            {"name": model.name, "task": str(model.task), "description": model.description}
            for model in MODEL_ENTRIES
        ],
        "architectures": [
            {"name": name, "family": family, "task": task} for name, (family, task) in ARCHITECTURES.items()
        ],
    }
