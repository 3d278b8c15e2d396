"""Bytes on the wire and in files: messages as ZeroMQ frames, tables of arrays, compression, their limits."""
