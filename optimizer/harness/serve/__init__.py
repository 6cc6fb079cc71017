"""Answers over the network: what `python -m harness serve` runs.

inference.py  the Open Inference Protocol v2, with its tensors in tensors.py; openai.py
versions.py   which version of which model answers; loader.py: opens them, again where asked to;
              starting.py: warmed up and behind a scheduler;
              settings.py: how much at once
cache.py      answers that were given before, where that is asked for
trial.py      whether a new version answers as the old one does; mirror.py asks both
app.py        paths to answers (ASGI); exchange.py, asgi.py: a request within limits; v2_http.py;
              refusals.py: errors; trace_context.py: whose trace a request is part of;
              tracing.py: its spans
plain_http.py HTTP by the standard library; uvicorn_http.py where that is installed
grpc_server.py  the same over gRPC; its messages in grpc_messages.py
command.py    all of it together, until SIGTERM; options.py, metrics.py, memory.py, ask.py

Models that answer in one run:
batching.py   which waiting rows run next, and which are refused; pure, without clock or thread
costs.py      how long a batch takes, measured at warm-up; exactness.py: what sharing one changes
model.py      a bundle as a server uses it; engine.py: the thread it runs in; warm_up.py

Models that continue texts:
slots.py      which text is continued next, and which are refused; pure as well
arrivals.py   measured at the start: what texts that come and go change, how long a step takes
prefixes.py   what was read of prompts, for those that begin alike
text_model.py such a bundle; decoding.py: the thread it runs in; text_metrics.py
openai_request.py, openai_answer.py, openai_texts.py   chat and completions, whole or streamed
"""
