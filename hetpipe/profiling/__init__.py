"""The measurement of a model on devices, which gives the profile that plans are made from.

`layer_profiler` measures layers with `layer_timer`, `link_profiler` messages and sums, each in a process of
its own; `profile_cache` keeps what was measured under everything that it depends on. `calibration` corrects a
profile by a run.

Others use:
    profile_cache: profile_model, merge, left_out, processor_name, MICROBATCH_SIZES
    calibration: calibrate
    layer_profiler: threads_for
    median_error: precision_text
"""
