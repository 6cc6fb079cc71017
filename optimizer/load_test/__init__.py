"""Load test of a server: requests at instants that do not depend on its answers (an open loop).

    stage          stage `slo`: the gates of a bundle's own server under load
    measure        one load test, at a rate or searching for the highest rate
    arrivals       instants at which requests are due
    requests       requests and the compared part of their answers, by path of the server
    inputs         texts and images to send
    open_loop      sending, and the reply to each request; http_client, grpc_client
    figures        percentiles with intervals, goodput, and the verdict on objectives
    highest_rate   search for the highest rate that meets the objectives
    server         a bundle's own server, for the time of a test
    tuning         search for the settings with the highest rate; tuned_server measures each

A client that waits for an answer before it sends the next request measures a server that is never
busy: it omits the requests that would have come meanwhile (coordinated omission). Here every time
counts from the instant at which a request was due, even where this machine sent it late.
"""
