"""The help of a verb: its options in groups, and an example that can be copied."""

from typing import Any

from typer.core import TyperCommand

FIRST = "Options"
"""The group of options that belong to no other."""

EXAMPLES = {
    "demo": "hetpipe demo -o my-demo",
    "init": "hetpipe init --emulate 0.6,0.4,0.2 -o cluster.toml",
    "profile": "hetpipe profile --model bert-tiny --cluster cluster.toml -o profile.json",
    "plan": "hetpipe plan --model bert-tiny --cluster cluster.toml -o plan.json",
    "explain": "hetpipe explain plan.json --model bert-tiny --cluster cluster.toml",
    "simulate": "hetpipe simulate plan.json --model bert-tiny --cluster cluster.toml",
    "compare": "hetpipe compare --model bert-tiny --cluster cluster.toml",
    "check": "hetpipe check --model gpt2",
    "run": "hetpipe run --model bert-tiny --cluster cluster.toml --steps 10",
    "plot": "hetpipe plot runs/bert-tiny-001",
    "watch": "hetpipe watch runs/bert-large-001",
    "models": "hetpipe models",
    "clusters": "hetpipe clusters four-unequal -o cluster.toml",
    "export": "hetpipe export runs/bert-tiny-001 -o my-model",
    "cache": "hetpipe cache --clear bert-tiny",
    "env": "hetpipe env",
}


class VerbCommand(TyperCommand):
    """A verb whose help shows the options group by group; an option says its group as `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, in the order in which groups first appear; the first one first."""
        groups: dict[str, list[tuple[str, str]]] = {FIRST: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                group = getattr(parameter, "rich_help_panel", None) or FIRST
                groups.setdefault(group, []).append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example in one line, however long, so that it can be copied."""
        formatter.write(f"\nExample:\n  {EXAMPLES[str(self.name)]}\n")
