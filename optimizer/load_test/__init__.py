"""How a server answers under load: requests at instants that no answer changes (an open loop).

    arrivals       when requests are sent
    requests       what is asked, and what an answer is, by the paths that a server has
    inputs         texts and images to ask
    open_loop      sends them, and notes what became of each; http_client, grpc_client
    figures        percentiles with intervals, goodput, and whether objectives are met
    highest_rate   the highest rate that meets them
    server         a bundle's own server, for the time of a test
    tuning         which settings carry most; tuned_server measures each

A client that waits for an answer before it sends the next one measures a server that is never
busy: what would have come meanwhile is left out (coordinated omission). Here every time counts from
the instant at which a request was due, also where this machine sent it late.
"""
