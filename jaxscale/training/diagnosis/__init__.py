"""Checks of the hosts, devices and links that a run is to use."""
