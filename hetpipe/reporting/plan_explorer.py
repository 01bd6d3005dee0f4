"""A plan with controls that change its cluster, for notebooks: cuts, memory and bound beside today's.

ipywidgets is loaded with the first explorer; without it the plan is shown as it is.
"""

import html
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from cost_model.cluster import Cluster
from cost_model.errors import InputError
from cost_model.profile import ModelProfile
from cost_model.what_if import changed, check_measured_links
from hetpipe.reporting.expense_tables import WhatIfRow
from hetpipe.reporting.plots import as_png, changed_plan, figure_of
from hetpipe.reporting.plots.picture import alternative_text
from hetpipe.reporting.tables import as_text, in_units, plan_sentences, plan_table, show
from hetpipe.reporting.what_if_plans import what_if_row, with_best
from partition.problem import Problem, problem_of

TODAY, AS_IT_IS = "today", "as it is"
NO_CONTROLS = "no controls: ipywidgets is not installed (pip install ipywidgets); the plan as it is:"
PLANNING = "planning ..."


class PlanExplorer:
    """The plan of `auto` for a cluster, and for what controls make of it.

    changes: for each control, by name, the changes that it offers beside none, as `hetpipe compare --what-if`
    takes them; those of several controls are made one after the other. proof_s: as for `hetpipe.solve`.

    controls: the widgets by name; their value is the change, "" for none. Setting it, by hand or in code,
    plans anew. row, text, picture (PNG): what is shown; of controls that contradict each other the reason and
    no picture. Without ipywidgets there are no controls. Plans are kept: what was asked before comes at once.

    Raises: InputError for what is no change of the cluster.
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        global_batch_size: int,
        changes: Mapping[str, Sequence[str]],
        *,
        proof_s: float | None = None,
    ) -> None:
        self.profile, self.cluster, self.global_batch_size = profile, cluster, global_batch_size
        self._proof_s = proof_s
        self._problems: dict[str, Problem] = {}
        self._rows: dict[str, WhatIfRow] = {}
        for change in (change for offered in changes.values() for change in offered):
            changed(cluster, change, profile.kinds)
        self.controls: dict[str, Any] = {}
        self._view: Any = None
        self.row, self.text, self.picture = self.planned(""), "", b""
        self._build(changes)
        self._show()

    def planned(self, change: str) -> WhatIfRow:
        """Return the plan after a change, or why there is none; today's for "".

        Raises: InputError for what is no change of the cluster, or cannot be planned for.
        """
        if change not in self._rows:
            problem = self._problem(change)
            self._rows[change] = what_if_row(change or TODAY, problem, proof_s=self._proof_s)
        return with_best(self._rows[change], self._problem(change), list(self._rows.values()))

    @property
    def change(self) -> str:
        """Return what the controls ask for together, as one change; "" for none."""
        return ", ".join(control.value for control in self.controls.values() if control.value)

    def _png(self) -> bytes:
        """Draw speeds with their bounds, cuts and memory, today's and those after the change."""
        today = self.planned("")
        clusters = self.cluster, self._problem(self.change).cluster
        row = self.row if self.change else today
        figure = figure_of(changed_plan(today, row, self.profile, clusters)[0])
        self._in_words = alternative_text(figure)
        return as_png(figure)

    def _problem(self, change: str) -> Problem:
        if change not in self._problems:
            cluster = changed(self.cluster, change, self.profile.kinds) if change else self.cluster
            check_measured_links(self.cluster, cluster, self.profile)
            self._problems[change] = problem_of(self.profile, cluster, self.global_batch_size)
        return self._problems[change]

    def _build(self, changes: Mapping[str, Sequence[str]]) -> None:
        """Make the widgets, where they can be made."""
        try:
            import ipywidgets
        except ImportError:
            return
        for name, offered in changes.items():
            control = ipywidgets.Dropdown(
                options=[(AS_IT_IS, ""), *((change, change) for change in offered)],
                value="",
                description=name,
                style={"description_width": "9em"},
                layout={"width": "32em"},
            )
            control.observe(lambda _: self._changed(), names="value")
            self.controls[name] = control
        self._said, self._picture = (
            ipywidgets.HTML(),
            ipywidgets.Image(format="png", layout={"max_width": "100%"}),
        )
        self._view = ipywidgets.VBox([*self.controls.values(), self._said, self._picture])

    def _changed(self) -> None:
        """Plan anew after a control was set; what cannot be done is said in its place."""
        self._said.value = PLANNING
        try:
            self.row = self.planned(self.change)
        except InputError as error:
            self._refuse(str(error))
        else:
            self._show()

    def _refuse(self, reason: str) -> None:
        """Show why there is nothing else to show."""
        self.row = WhatIfRow(self.change, None, reason=reason)
        said = [f"what if: {self.change}", f"cannot be planned for: {in_units(reason)}"]
        self.text, self.picture = "\n".join(said), b""
        self._said.value = f"<p>{'<br>'.join(map(html.escape, said))}</p>"
        self._picture.value, self._picture.layout.display = self.picture, "none"

    def _show(self) -> None:
        sentences, table = self._described()
        self.text, self.picture = "\n".join([*sentences, table]), self._png()
        if self._view is not None:
            lines = "<br>".join(map(html.escape, sentences))
            self._said.value = f'<p>{lines}</p><pre style="overflow-x:auto">{html.escape(table)}</pre>'
            self._picture.value, self._picture.layout.display = self.picture, None

    def _described(self) -> tuple[list[str], str]:
        """Return sentences on the plan shown, and the table of its stages."""
        cluster, plan = self._problem(self.change).cluster, self.row.plan
        sentences = [f"what if: {self.change}"] if self.change else []
        if plan is None:
            return [*sentences, f"no plan: {in_units(str(self.row.reason))}"], ""
        today_s, step_s = self.planned("").step_s, self.row.step_s
        if self.change and today_s and step_s:
            sentences[0] += f" ({today_s / step_s:.2f} times as fast as today)"
        table = as_text(plan_table(plan, self.profile, cluster))
        return [*sentences, *plan_sentences(plan, self.profile, cluster)], table

    def _ipython_display_(self) -> None:
        """Show the controls; with a picture for pages that show no widgets, such as a stored notebook."""
        from IPython.display import display

        shown = {} if self._view is None else self._view._repr_mimebundle_()
        if self._view is None:
            show([NO_CONTROLS, self.text])
        picture = {"image/png": b64encode(self.picture).decode()} if self.picture else {}
        words = {"image/png": {"alt": self._in_words}} if self.picture else {}
        display({**shown, **picture, "text/plain": self.text}, metadata=words, raw=True)
