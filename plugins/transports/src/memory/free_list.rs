//! The free pages of a memory range.

use std::collections::BTreeMap;

/// The free runs of pages: the length of each by its first page. Adjacent runs are merged.
#[derive(Debug, Default)]
pub(crate) struct FreeList {
    runs: BTreeMap<usize, usize>,
}

impl FreeList {
    /// Makes a list of `pages` free pages, from `first` on.
    pub(crate) fn new(first: usize, pages: usize) -> Self {
        Self { runs: BTreeMap::from([(first, pages)]) }
    }

    /// Takes the lowest run of `pages` free pages, so that used pages are reused.
    pub(crate) fn take(&mut self, pages: usize) -> Option<usize> {
        let (&first, &len) = self.runs.iter().find(|(_, len)| **len >= pages)?;
        self.runs.remove(&first);
        if len > pages {
            self.runs.insert(first + pages, len - pages);
        }
        Some(first)
    }

    /// Frees taken pages.
    pub(crate) fn put(&mut self, first: usize, pages: usize) {
        let (mut first, mut pages) = (first, pages);
        if let Some((&before, &len)) = self.runs.range(..first).next_back()
            && before + len == first
        {
            self.runs.remove(&before);
            (first, pages) = (before, len + pages);
        }
        if let Some(len) = self.runs.remove(&(first + pages)) {
            pages += len;
        }
        self.runs.insert(first, pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// No page is handed out twice, and after all are freed the list is one run again.
        #[test]
        fn gives_each_page_once(moves in prop::collection::vec((1usize..40, any::<bool>(), any::<prop::sample::Index>()), 0..200)) {
            let mut list = FreeList::new(7, 100);
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (pages, take, index) in moves {
                if take || held.is_empty() {
                    if let Some(first) = list.take(pages) {
                        prop_assert!(first >= 7 && first + pages <= 107);
                        for &(other, len) in &held {
                            prop_assert!(first + pages <= other || other + len <= first);
                        }
                        held.push((first, pages));
                    }
                } else {
                    let (first, pages) = held.swap_remove(index.index(held.len()));
                    list.put(first, pages);
                }
            }
            for (first, pages) in held {
                list.put(first, pages);
            }
            prop_assert_eq!(list.take(100), Some(7));
        }
    }

    #[test]
    fn too_long_runs_are_refused() {
        let mut list = FreeList::new(0, 4);
        assert_eq!(list.take(5), None);
        assert_eq!(list.take(3), Some(0));
        assert_eq!(list.take(2), None);
        list.put(0, 3);
        assert_eq!(list.take(4), Some(0));
    }
}
