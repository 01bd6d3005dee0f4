"""Why a plan is as it is, as values: reporting makes sentences of them.

explain says what limits each stage, what devices that are left out would add and how plain ways to train
compare; gains how much of the speed over plain training comes from balance and how much from memory; pareto
which devices to use where money and energy count, too, by bounds of sets of devices (device_sets).

For others:
    explain: explain, Explanation, StageReason, Limit, LeftOut, Alternative
    gains: Gain, gain, best_other
    pareto: pareto, best_within, Front, Choice, CostedPlan, Limits
"""
