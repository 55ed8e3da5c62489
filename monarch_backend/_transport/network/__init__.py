"""Connections between hosts: TCP, TLS, authentication, gateways, multicast."""
