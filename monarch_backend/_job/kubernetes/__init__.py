"""Jobs on Kubernetes: objects that run hosts (manifests.py), the API's client (api.py), states of pods, the job."""
