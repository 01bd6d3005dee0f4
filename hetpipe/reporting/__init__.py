"""Traces and plans for people: what a step waits for, as tables, sentences and pictures.

`idle_time` and `critical_path` explain a trace by its causes, `speed_breakdown` weighs them by the devices'
speed; `tables`, `host_sentences`, `comparison_tables`, `largest_sizes`, `run_tables`, `plots` and `pages`
only show. matplotlib is loaded by `plots` alone. No torch here.

Others use:
    idle_time: DeviceTime, device_times, exchange_words
    critical_path: Share, critical_path, shares
    speed_breakdown: speed_shares, speed_sentence
    tables: console, show, plan_table, plan_sentences, waiting_table,
        profile_table, path_sentence, bound_sentence, estimate_sentences
    sums_table: sums_table, summed_gradients
    progress: progress_bar, bar_if_long, step_bar
    largest_sizes: largest_table, curve_table, LARGEST_MEANS, CURVE_MEANS
    comparison_tables: comparison_table, misfit_sentences, gain_sentence
    run_tables: run_report_tables, run_marks, measured_table
    measured_tables: measured_rounds_tables
    plots: gantt, stage_labels, speedups, save, and the other names of its list
    host_sentences: host_sentences, rate_sentences
    plain_strategies: beside_others, even_split
    what_if_plans: what_if_row, with_best
    plan_explorer: PlanExplorer
    pages: write_page, page_data, page_text, live_data, tokens_of_sample
    plots.style: new_axes, save, strip
"""
