"""What other projects start a bundle with: files for one platform, in one folder.

source.py      the bundle, as far as files are made of it; settings.py: what the user decides
platforms.py   the platforms, one record each
place.py       the folder, which appears whole; written.py: what is said of it
triton.py      a model repository; templates/model.py.txt is the model's code
ray.py         an application of Ray Serve; templates/application.py.txt is what Ray imports
kubernetes.py, kserve.py, compose.py   servers in containers: server.py says what one takes, by
               measured.py; image.py, dashboard.py
"""
