"""From a good set of pipelines to a better one: moves of layers, devices and samples.

moves changes one thing at a time as long as that helps; threshold_accepting also accepts a little worse, to
get away from where moves end; placement puts pipelines of classes on named devices; starts makes the sets to
begin with, and pipeline_search is the whole way from starts to the best set, with the columns and dynamic
programmes of earlier chapters.

For others:
    pipeline_search: PipelineSearch; moves: LocalSearch, PipelineSet, fitted
"""
