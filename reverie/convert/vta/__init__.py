"""Import checkpoints and config files of VTA.

There are two implementations: that of the authors (taesupkim/vta), and its port with
actions, bouncing balls and Dreamer (Mainlst/stable-deep-world-model), here called the
port.
"""
