"""Messages, chunks, spaces, settings, keys and errors that all processes share. Imports no other room of Headrace."""
