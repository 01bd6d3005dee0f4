"""The files of a run: how it was to train, what it wrote, and how it went.

A run has one folder; `RunFolder` knows the name of each file in it. `Settings` is everything of a run that is
neither model, cluster nor plan; `TaskSettings` is what its task is made from. `lora` is what adapters a model
is trained with, `optimizers` are those that have a name. `metric_sinks` send the metrics of a run to
TensorBoard and others. `kept_texts` are tokens in the cache. `RunReport` sets what was measured beside what
was predicted. No torch here.

Others use:
    identity: identity_of, run_id_for
    run_folder: RunFolder, MetricsRow, numbered_runs, PREDICTED, MEASURED, DEVICE_CLOCKS
    growing_metrics: GrowingMetrics
    kept_texts: KeptText, kept_texts, kept_hashes
    metric_sinks: SinkKind, Sinks, check_installed, run_facts
    lora: LoraSettings, parse_lora, read_adapter_settings, EXAMPLE, MARK
    optimizers: OptimizerKind, num_states, check_taken
    settings: Settings, TaskSettings, check_lengths, Clock, checked_settings, read_settings, settings_text
    run_report: RunReport, StageReport, DeviceReport, read_report, report_text, OVERLOADED_CORES,
        OVERLOADED_SHARE
    warned: warn_caller
"""
