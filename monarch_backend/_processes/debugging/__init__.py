"""Debugger of processes without a terminal: pdb whose input and output is a local socket, and its clients."""
