"""Implements a front, the gateway of one region.

A front serves the core's gRPC services to learners and readers and calls the core on their behalf. If a front loses its
state, no work is lost.

`service` receives learners' calls and passes their uploads on. `region_fetches` answers learners and readers from
`fetch_cache`, which caches updates and whole fragments. `region_reads` tracks the newest versions for readers.
`pass_through` forwards operators' calls. `announcing` tells the core that the front runs.

May import: access, rpc, settings, upstream.
"""
