"""Adapters: other libraries' learners trained from an `EpisodeStream`. Import each from its own module."""
