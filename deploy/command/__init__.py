"""The command line: a function for each command, which reads options and calls the other packages of `deploy`."""
