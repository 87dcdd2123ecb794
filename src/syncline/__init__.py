"""Syncline: data-parallel PyTorch training that is fast on networks that are not uniform."""
