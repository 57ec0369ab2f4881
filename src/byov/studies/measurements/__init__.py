"""Measurements that several studies share."""
