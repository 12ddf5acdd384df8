"""One file per benchmark, with what several of them share: haystacks, rows of data sets, stories of bAbI."""
