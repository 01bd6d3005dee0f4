"""One run on several hosts: who leads and who follows, what they compare, and what they tell each other.

On each host one launcher is started with the same line. The one that the rendezvous names leads: it owns the
run folder that the user looks at, has the other hosts measure, plans, and sends each the job; the others
follow: each fills a folder of its own and starts its own ranks. `conversation` is how two launchers talk,
`rendezvous` where they meet, `agreement` what has to be alike before the first step, `job` what is sent;
`leader` and `member` are the two sides.

Others use:
    leader: Leader
    member: follow
    rendezvous: Rendezvous, parse_rendezvous
    agreement: Facts, facts_of
"""
