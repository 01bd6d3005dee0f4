"""Plans in which pipelines share devices: candidates beside those of pipelines of their own.

`shifted_cuts.shared_plans` has stages replicated on groups of devices and pipelines with a second cut, for
where memory binds; `interleaved.interleaved_plans` visits equal devices twice, for few microbatches.
examples/benchmarks/planner/README.md shows what each of the three wins.
"""
