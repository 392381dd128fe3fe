"""Generated sequence datasets: bouncing balls and a maze."""
