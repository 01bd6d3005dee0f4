"""models: what --model takes."""

from typing import Any

from hetpipe.commands.options import JsonOption
from hetpipe.commands.output import print_json
from hetpipe.models.huggingface_folder import TESTED, task_of
from hetpipe.models.names import MODEL_ENTRIES
from hetpipe.models.tasks import Task
from hetpipe.reporting.tables import new_table, show


def models_command(json: JsonOption = False) -> None:
    """List the models by name, and the architectures of Hugging Face folders that are taken."""
    if json:
        print_json(_as_json())
        return
    names = new_table("model", "task", "what it is")
    for model in MODEL_ENTRIES:
        names.add_row(model.name, str(model.task), model.description)
    folders = new_table("task", "architectures of a folder")
    for task in Task:
        taken = [name for name in TESTED if task_of(name) == task]
        folders.add_row(str(task), ", ".join(sorted(taken, key=str.lower)))
    show(
        [
            names,
            folders,
            "a folder: --model ./my-model, as save_pretrained writes it, with weights or without",
            "any other class of transformers with the head of such a task: taken if its split is proven when "
            "a run begins",
            "any other chain of layers: hetpipe.Trainer, from Python",
        ]
    )


def _as_json() -> dict[str, Any]:
    return {
        "models": [
            {"name": model.name, "task": str(model.task), "description": model.description}
            for model in MODEL_ENTRIES
        ],
        "architectures": [{"name": name, "task": task_of(name)} for name in TESTED],
    }
