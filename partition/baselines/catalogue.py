"""All strategies beside `auto`, by name: those that most people know, and those of published systems."""

from collections.abc import Mapping

from partition.baselines.bandwidth_groups import hexiscale, zorse
from partition.baselines.cephalo import cephalo
from partition.baselines.data_parallel import ddp, poplar
from partition.baselines.flops_shares import hap, whale_dp
from partition.baselines.heterog import heterog
from partition.baselines.layer_splits import (
    gpipe_even,
    memory_proportional,
    single,
    speed_proportional,
    torchgpipe,
    whale_pp,
)
from partition.baselines.pipedream import pipedream
from partition.baselines.poplar_rules import poplar_0, poplar_1
from partition.baselines.poplar_steps import poplar_2, poplar_3
from partition.baselines.strategy import Strategy
from partition.baselines.virtual_workers import hetpipe_ed, hetpipe_hd, hetpipe_np

WELL_KNOWN: Mapping[str, Strategy] = {
    "single": single,
    "ddp": ddp,
    "poplar": poplar,
    "gpipe-even": gpipe_even,
    "torchgpipe": torchgpipe,
    "memory-proportional": memory_proportional,
    "speed-proportional": speed_proportional,
    "pipedream": pipedream,
}
"""Those that people compare with where they ask for none by name."""

PUBLISHED: Mapping[str, Strategy] = {
    "poplar-0": poplar_0,
    "poplar-1": poplar_1,
    "poplar-2": poplar_2,
    "poplar-3": poplar_3,
    "heterog": heterog,
    "hetpipe-np": hetpipe_np,
    "hetpipe-ed": hetpipe_ed,
    "hetpipe-hd": hetpipe_hd,
    "whale-dp": whale_dp,
    "whale-pp": whale_pp,
    "hap": hap,
    "cephalo": cephalo,
    "hexiscale": hexiscale,
    "zorse": zorse,
}
"""The rules of systems for unlike devices; docs/systems has a page for each."""

BASELINES: Mapping[str, Strategy] = {**WELL_KNOWN, **PUBLISHED}
