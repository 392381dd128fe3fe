"""Drawing of arrays as images, plots and videos, without agents or loggers."""
