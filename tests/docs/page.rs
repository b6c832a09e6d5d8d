//! A page of Markdown: its headings as anchors, its links, its blocks of code and its inline code.
//!
//! Only forms that the pages of this repository use are read: fences of three backticks, headings
//! with `#`, links `[text](target)`.

#[derive(Clone, Debug)]
pub(crate) struct Block {
    /// Number of the line with the opening fence, counted from 1.
    pub(crate) line: usize,
    /// The text after the opening fence, such as `toml fragment`.
    pub(crate) info: String,
    pub(crate) text: String,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Page {
    /// Path from the root of the repository.
    pub(crate) path: String,
    pub(crate) anchors: Vec<String>,
    pub(crate) links: Vec<(usize, String)>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) spans: Vec<(usize, String)>,
}

impl Page {
    pub(crate) fn parse(path: &str, text: &str) -> Self {
        let mut page = Self { path: path.to_owned(), ..Self::default() };
        let mut open: Option<Block> = None;
        for (number, line) in text.lines().enumerate() {
            let number = number + 1;
            if let Some(info) = line.trim_start().strip_prefix("```") {
                match open.take() {
                    Some(block) => page.blocks.push(block),
                    None => open = Some(Block { line: number, info: info.trim().to_owned(), text: String::new() }),
                }
                continue;
            }
            if let Some(block) = &mut open {
                block.text += line;
                block.text.push('\n');
                continue;
            }
            if let Some(heading) = line.strip_prefix('#') {
                page.add_anchor(heading.trim_start_matches('#').trim());
            }
            page.spans.extend(line.split('`').skip(1).step_by(2).map(|span| (number, span.to_owned())));
            page.add_links(number, line);
        }
        assert!(open.is_none(), "{path}: a block of code has no end");
        page
    }

    /// Adds the anchor that GitHub gives a heading: lower case, without punctuation, hyphens for
    /// blanks; repeated headings are numbered.
    fn add_anchor(&mut self, heading: &str) {
        let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
        let anchor: String =
            kept.flat_map(char::to_lowercase).map(|letter| if letter == ' ' { '-' } else { letter }).collect();
        let same =
            |known: &&String| **known == anchor || known.strip_prefix(&format!("{anchor}-")).is_some_and(is_number);
        let before = self.anchors.iter().filter(same).count();
        self.anchors.push(if before == 0 { anchor } else { format!("{anchor}-{before}") });
    }

    fn add_links(&mut self, number: usize, line: &str) {
        // Brackets in inline code are not links.
        let text: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        self.links.extend(targets.map(|(target, _)| (number, target.to_owned())));
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[test]
fn a_page_is_read() {
    let text = "# A `b` page, no. 1\n## Same\n## Same\n[x](y.md#z) and `sluice a` and `[n](o)`\n```sh x\n# no\n```\n";
    let page = Page::parse("p.md", text);
    assert_eq!(page.anchors, ["a-b-page-no-1", "same", "same-1"]);
    assert_eq!(page.links, [(4, "y.md#z".to_owned())]);
    assert_eq!(page.spans[1..], [(4, "sluice a".to_owned()), (4, "[n](o)".to_owned())]);
    assert_eq!((page.blocks[0].line, &*page.blocks[0].info, &*page.blocks[0].text), (5, "sh x", "# no\n"));
}
