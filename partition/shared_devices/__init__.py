"""Plans in which pipelines share devices: a device serves several stages, and holds their layers once.

shifted_cuts: pipelines over the same devices, each cut somewhere else; replicated_stages: stages that several
pipelines pass, with copies of others; interleaved: a device serves every so many-th stage of one pipeline
(Narayanan et al., SC 2021).

For others:
    shifted_cuts: shared_plans, sharing_may_win, memory_binds; interleaved: interleaved_plans
"""
