"""Write the files with which other platforms serve a bundle into one folder.

source.py      the bundle to deploy; settings.py: the options of `optimize deploy`
platforms.py   the table of platforms
output.py      the output folder, written atomically
triton.py      a model repository; templates/model.py.txt is its model.py
ray.py         a Ray Serve application; templates/application.py.txt is its code
kubernetes.py, kserve.py, compose.py   servers in containers: server.py gives their options and
               resources, measured.py measures them; image.py: Dockerfile; dashboard.py: Grafana
"""
