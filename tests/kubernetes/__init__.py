"""The manifests of `examples/kubernetes`: against Kubernetes' schemas, against each other, and their pods as processes.

Their files are named so that only `nox -s kubernetes` collects them: they need a validator and a linter, whose versions
`constraints.txt` in this folder has. There is no cluster in any of it.
"""
