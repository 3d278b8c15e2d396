"""What is counted: the books, the recorder that outlives its worker, figures, the names in Redis."""
