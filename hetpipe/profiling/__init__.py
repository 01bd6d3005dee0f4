"""The measurement of a model on devices, which gives the profile that plans are made from.

`layer_profiler` measures layers with `layer_timer`, and with `host_rate` how fast the CPU steps;
`link_profiler` measures messages and sums; each in a process of its own. `profile_cache` keeps what was
measured under everything that it depends on. `calibration` corrects a profile by a run. `merging` joins
profiles, `doubtful_profiles` tells which are too rough to plan by.

Others use:
    profile_cache: profile_model, processor_name, MICROBATCH_SIZES
    merging: merge, left_out
    doubtful_profiles: doubt_sentences
    cached_profiles: cached_profiles, CachedProfile
    calibration: calibrate
    median_error: precision_text
"""
