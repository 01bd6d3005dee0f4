"""From good sets of pipelines to better ones: starts, local search, threshold accepting, recombination.

Each device serves one stage of one pipeline. Others use `PipelineSearch`, and `LocalSearch` for
sets of their own.
"""
