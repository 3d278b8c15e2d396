"""The sampling side: it steps environments with the newest policy and cuts their episodes into chunks."""
